"""Callbacks for the trainers of other packages, for those who prefer them to `%guard on`: each in a module that is
named as its package, which importing it imports.

    from nbdebug.integrations.transformers import GuardCallback     Trainer(..., callbacks=[GuardCallback()])
    from nbdebug.integrations.lightning import GuardCallback        pl.Trainer(callbacks=[GuardCallback()])
"""
