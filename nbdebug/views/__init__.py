"""Views: a Report drawn for people, as text, as HTML for notebooks, and as a figure; each a pure function of plain data."""
