"""Views: a Report drawn for people, as text, as HTML for notebooks and as a figure. Each only reads plain data."""

from __future__ import annotations
