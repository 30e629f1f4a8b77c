"""What the checks of a chapter share: from a measurement, through its evidence, to a verdict."""
