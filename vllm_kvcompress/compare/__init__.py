"""What compression costs in answers, on an operator's own prompts or on built-in tasks."""
