"""`audit_update`: did the optimizer do what it was configured to do?"""
