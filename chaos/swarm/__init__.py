"""One seed, a whole bad day: random worlds, what must hold in them, and what becomes of those that broke it."""
