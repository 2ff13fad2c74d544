"""Several engines as one: where a sequence runs, and how it goes on when its engine is lost. No torch, no wire, no tenants."""
