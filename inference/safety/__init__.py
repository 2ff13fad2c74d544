"""What prompts and outputs are checked for: rules here, classifiers in a process of their own."""
