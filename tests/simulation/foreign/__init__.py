"""A backend of a third party (torch's key PrivateUse1) on the host's memory: clean, and with broken autocast rules."""
