"""Programs that write fixtures and evidence pages."""
