"""The agent on a device: takes part in rounds, personalizes the model and answers; the data stays where it is."""
