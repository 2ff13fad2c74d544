"""Safety checks of prompts and outputs: regular expression rules, and classifiers in a child
process.
"""
