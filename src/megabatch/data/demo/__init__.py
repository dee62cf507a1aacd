"""Data for demonstrations and tests, from packages on PyPI: emoji with their names, words with their definitions."""
