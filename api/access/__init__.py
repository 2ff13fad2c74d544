"""Who may come in and what for: TLS, keys, scopes, and what is borne of those who knock with wrong ones."""
