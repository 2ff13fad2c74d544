"""Authentication and authorization: TLS, API keys, scopes, throttling of failed attempts."""
