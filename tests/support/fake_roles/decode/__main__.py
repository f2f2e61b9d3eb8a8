from tests.support.fake_role import main

main("decode")
