"""DLRM's dot interaction, forward and backward."""
