"""One report document in, every view out; needs neither torch nor pytest."""
