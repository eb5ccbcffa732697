"""From a sample to this device's answer, and how the answers become the device's own.

``service`` answers and swaps models. ``personalizers`` says which ways there are, ``personal_files`` makes and stores
what they need, ``predictor`` computes probabilities, ``relearn`` takes new samples in while answering.
``model_check`` refuses a model that does worse on the device's own samples. ``bundle_check`` checks a bundle. No
torch.
"""
