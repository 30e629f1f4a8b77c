"""The run: options, targets, catalogue, cases, verdicts, waivers and the pytest plugin."""
