"""Safety checks of prompts and outputs: rules, and classifiers in a child process."""
