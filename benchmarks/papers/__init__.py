"""Figures of the papers, predicted for their hardware: section ``papers`` of topic ``simulate``."""
