"""What a run could have cost at best: a proven lower bound (`lower`), the best plan that never changes (`static`)."""
