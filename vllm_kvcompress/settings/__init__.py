"""What users may set: flags, keys, what a request may ask for."""
