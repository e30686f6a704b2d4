"""From a checkpoint to answers: predictors, exports, and a server for them."""
