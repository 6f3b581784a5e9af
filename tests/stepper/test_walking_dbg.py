from tests.stepper.test_walking import *
def test_zzz():
    import nbdebug
    net=model()
    stepper = step_through(net, (batch()[0][:, :3], None), lambda m, b: m(b[0]).sum())
    stepper.finish()
    print(nbdebug.explain(stepper.error)); assert 0
