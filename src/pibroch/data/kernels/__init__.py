"""Text, vocabularies, samples and histories."""
