"""Prices per token: versions, who pays which, and their arithmetic."""
