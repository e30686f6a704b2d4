"""pibroch: deep recommendation models whose embedding tables outgrow one machine."""
