"""What is worth keeping: prices, and the rules that follow from them."""
