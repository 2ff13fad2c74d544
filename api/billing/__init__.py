"""`BillingService` and `ReceiptService`: months, invoices, usage and receipts."""
