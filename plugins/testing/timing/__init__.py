"""Times of the calls of a component: the test, and its figures."""
