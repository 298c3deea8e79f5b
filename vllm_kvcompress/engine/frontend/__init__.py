"""What runs where requests are taken: their settings, names, figures, and usage."""
