"""`audit_update` compares the parameters of a model before and after a step of its optimizer."""
