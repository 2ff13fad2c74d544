"""What should be, as one document: differences, applying, export."""
