"""View: an incident's memory and requests as one HTML file that needs nothing else (`bandmaster view`)."""
