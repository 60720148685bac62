"""The commands of `bandmaster`, one module each. Nothing in the product imports them."""
