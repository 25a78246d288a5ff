"""The web page over a journal: what it shows is a pure view of the records; it may not write one or ask the cluster."""
