"""Jobs made of the library's verbs: plan, run, sweep, demo, push."""
