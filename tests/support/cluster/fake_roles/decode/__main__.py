from tests.support.cluster.fake_role import main

main("decode")
