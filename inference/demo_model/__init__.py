"""The bundled demo model: a small hotel-search copilot, the text it learned from, and the script that trains it."""
