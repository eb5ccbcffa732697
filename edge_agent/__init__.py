"""The agent on a device: takes part in rounds, personalizes the model and answers, with the data staying where it is."""
