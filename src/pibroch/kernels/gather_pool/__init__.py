"""Look rows up and pool them."""
