"""Random programs of autocast regions and the model of the region stack."""
