"""The pictures of a report: one file a picture, with what it shows and how it is drawn."""
