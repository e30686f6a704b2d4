"""What training takes on machines that are not here: the same objects, without their network."""
