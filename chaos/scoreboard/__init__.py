"""`qm bench`: every controller on every scenario, their best points in hindsight, and what the bounds say of them."""
