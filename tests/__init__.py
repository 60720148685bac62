"""All tests, one folder per room; `tidy` holds the repository to its own rules, `e2e` runs the whole product."""
