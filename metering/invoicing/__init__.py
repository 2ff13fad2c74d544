"""Closing of months: reports, invoices, credit notes and adjustments."""
