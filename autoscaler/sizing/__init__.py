"""What shapes would do before anybody deploys them: predicted tables, ranked shapes, laws fitted to measurements."""
