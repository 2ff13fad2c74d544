"""Plans, prepaid credit and simulations of both."""
