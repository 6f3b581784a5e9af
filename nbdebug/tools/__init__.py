"""The tools: one folder for each question that a person asks of a broken training.

A tool has five roles, with one word each: *arguments* (what the user gave, checked), *probe* (the only code that
touches torch or the disk), *facts* (frozen dataclasses of plain numbers and names), *rules* (pure functions from
facts to findings, with their *wording*) and *report*. Everything else in a folder bears the noun that the literature
uses for it. Tools do not import one another, but for the edges that the import contracts in pyproject.toml name.
"""
