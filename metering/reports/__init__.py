"""Reports for customers: usage, forecast, FOCUS."""
