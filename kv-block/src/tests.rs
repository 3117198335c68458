use proptest::prelude::*;

use super::*;

fn seed() -> ChainSeed {
    ChainSeed::new(Fingerprint([1; 32]), LayoutId([2; 32]), IsolationKey::SHARED)
}

fn tokens(ids: impl IntoIterator<Item = u32>) -> Vec<Token> {
    ids.into_iter().map(Token).collect()
}

fn row(row_bytes: u32) -> RowSpec {
    RowSpec { dtype: 1, row_bytes }
}

fn layer(k: u32, v: Option<u32>) -> LayerSpec {
    LayerSpec { k: row(k), v: v.map(row) }
}

/// Two sections; the last layer is latent (keys only).
fn sections() -> Vec<Section> {
    vec![
        Section { layers: vec![layer(384, Some(384))] },
        Section { layers: vec![layer(512, Some(256)), layer(1152, None)] },
    ]
}

fn layout() -> Layout {
    Layout::new(sections()).unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// These name blocks between nodes of any build and architecture: a change
/// here is a change of the protocol.
#[test]
fn identities_are_stable() {
    let table = BlockTable::new(seed(), &tokens(0..10), 4);
    let salted = IsolationKey::from_salt("tenant");
    assert_eq!(hex(&layout().id().0), "a4c8e2124f6809a6bc828469e0fbb8f040b44c29b151b5a1810874b069d67302");
    assert_eq!(hex(&table.hashes()[0].0), "f8884187a12ec1262271ea31bd7717f878179ef1cc8790b8ed9a35eafa943831");
    assert_eq!(hex(&table.hashes()[2].0), "2ad278c46c0c37c54bdb1ac228038ee89f815770b5c90a0698fc9a78806250ba");
    assert_eq!(hex(&table.digest(1).0), "bf3514191a14f2183d22a6d06c43eb1f315fac3ddc7e818e34e1242eab69586b");
    assert_eq!(hex(&salted.0), "825016aaafa2ebc3b0e715c9c0085ee0bf047562c2a2f88d7eb7c37443871fdc");
}

#[test]
fn a_tail_never_equals_a_full_block() {
    let full = BlockTable::new(seed(), &tokens([1, 2, 3, 0]), 4);
    let tail = BlockTable::new(seed(), &tokens([1, 2, 3]), 4);
    assert_ne!(full.hashes(), tail.hashes());
    assert_eq!((full.full_blocks(), tail.full_blocks()), (1, 0));
    assert_eq!((full.block_count(), tail.block_count()), (1, 1));
}

#[test]
fn the_chain_depends_on_everything_that_kv_depends_on() {
    let (model, layout, key) = (Fingerprint([1; 32]), LayoutId([2; 32]), IsolationKey::SHARED);
    let seeds = [
        ChainSeed::new(model, layout, key),
        ChainSeed::new(Fingerprint([9; 32]), layout, key),
        ChainSeed::new(model, LayoutId([9; 32]), key),
        ChainSeed::new(model, layout, IsolationKey::from_salt("")),
        ChainSeed::new(model, layout, IsolationKey::from_salt("a")),
    ];
    let mut hashes: Vec<_> =
        seeds.iter().map(|seed| BlockTable::new(*seed, &tokens(0..4), 4).hashes()[0]).collect();
    hashes.sort();
    hashes.dedup();
    assert_eq!(hashes.len(), seeds.len());
}

#[test]
fn the_digest_covers_the_blocks_sent_and_no_others() {
    let table = BlockTable::new(seed(), &tokens(0..10), 4);
    assert_ne!(table.digest(0), table.digest(1));
    assert_eq!(table.digest(3), table.digest(usize::MAX), "nothing sent");
    assert_ne!(table.digest(2), table.digest(3));
}

#[test]
fn indices_past_the_end_are_empty_however_large() {
    let table = BlockTable::new(seed(), &tokens(0..10), 4);
    assert_eq!(table.tokens_of(2), 8..10);
    assert_eq!(table.tokens_of(3), 10..10);
    assert_eq!(table.tokens_of(usize::MAX), 10..10);
    assert_eq!(table.hash(usize::MAX), None);
    assert_eq!(BlockTable::new(seed(), &tokens(0..10), usize::MAX).tokens_of(0), 0..10);
    assert_eq!(BlockTable::new(seed(), &tokens(0..10), usize::MAX).tokens_of(usize::MAX), 10..10);
}

#[test]
fn no_tokens_make_no_blocks() {
    let table = BlockTable::new(seed(), &[], 4);
    assert_eq!((table.block_count(), table.full_blocks(), table.tokens_of(0)), (0, 0, 0..0));
}

#[test]
fn parts_are_in_wire_order_and_found_by_name() {
    let layout = layout();
    let names: Vec<String> = layout.parts().iter().map(|(part, _)| part.to_string()).collect();
    let expected = [
        "section 0 layer 0 K",
        "section 0 layer 0 V",
        "section 1 layer 0 K",
        "section 1 layer 0 V",
        "section 1 layer 1 K",
    ];
    assert_eq!(names, expected);
    for (index, (part, row)) in layout.parts().iter().enumerate() {
        assert_eq!((layout.part_index(*part), layout.row(*part)), (Some(index), Some(*row)));
    }
    assert_eq!(layout.part_index(Part { section: 1, layer: 1, side: Side::V }), None);
    assert_eq!(layout.row(Part { section: 2, layer: 0, side: Side::K }), None);
    assert_eq!(layout.bytes_per_token(), 384 + 384 + 512 + 256 + 1152);
}

#[test]
fn the_layout_id_changes_with_every_property() {
    let mut variants = vec![sections(); 6];
    variants[1][0].layers[0].k.row_bytes = 385;
    variants[2][0].layers[0].k.dtype = 8;
    variants[3][1].layers[1].v = Some(row(1));
    variants[4].swap(0, 1);
    variants[5][1].layers.pop();
    let mut ids: Vec<_> = variants.into_iter().map(|sections| Layout::new(sections).unwrap().id()).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 6);
}

#[test]
fn layouts_outside_the_bounds_are_refused_with_the_value() {
    let of = |layers| vec![Section { layers }];
    let cases = [
        (vec![], "layout has 0 sections, allowed 1 to 16"),
        (vec![Section { layers: vec![layer(1, None)] }; 17], "layout has 17 sections, allowed 1 to 16"),
        (of(vec![]), "layout section 0 has 0 layers, allowed 1 to 1024"),
        (of(vec![layer(1, None); 1025]), "layout section 0 has 1025 layers, allowed 1 to 1024"),
        (of(vec![layer(0, None)]), "layout row has 0 bytes, allowed 1 to 1048576"),
        (of(vec![layer(1, Some(1_048_577))]), "layout row has 1048577 bytes, allowed 1 to 1048576"),
    ];
    for (sections, message) in cases {
        assert_eq!(Layout::new(sections).unwrap_err().to_string(), message);
    }
}

#[test]
fn ids_print_short_enough_for_a_log() {
    assert_eq!(BlockHash([0xab; 32]).to_string(), "abababababababab");
    assert_eq!(format!("{:?}", HandoffId([1; 16])), "HandoffId(01010101010101010101010101010101)");
}

proptest! {
    #[test]
    fn a_changed_token_changes_its_block_and_all_after_it_only(
        ids in proptest::collection::vec(any::<u32>(), 1..60),
        position in any::<prop::sample::Index>(),
        change in 1u32..,
        block_tokens in 1usize..20,
    ) {
        let position = position.index(ids.len());
        let mut other = ids.clone();
        other[position] ^= change;
        let a = BlockTable::new(seed(), &tokens(ids), block_tokens);
        let b = BlockTable::new(seed(), &tokens(other), block_tokens);
        let block = position / block_tokens;
        prop_assert_eq!(&a.hashes()[..block], &b.hashes()[..block]);
        for index in block..a.block_count() {
            prop_assert_ne!(a.hash(index), b.hash(index));
        }
        prop_assert_ne!(a.digest(0), b.digest(0));
    }

    #[test]
    fn blocks_cover_every_token_exactly_once(count in 0usize..200, block_tokens in 1usize..50) {
        let table = BlockTable::new(seed(), &tokens(0..count as u32), block_tokens);
        let covered: Vec<usize> = (0..table.block_count()).flat_map(|index| table.tokens_of(index)).collect();
        prop_assert_eq!(covered, (0..count).collect::<Vec<_>>());
        prop_assert_eq!(table.full_blocks(), count / block_tokens);
        prop_assert!(table.block_count() - table.full_blocks() <= 1);
    }

    #[test]
    fn full_blocks_of_a_prefix_are_those_of_the_whole(
        ids in proptest::collection::vec(any::<u32>(), 0..80),
        keep in 0usize..80,
    ) {
        let whole = BlockTable::new(seed(), &tokens(ids.clone()), 8);
        let prefix = BlockTable::new(seed(), &tokens(ids.into_iter().take(keep)), 8);
        let full = prefix.full_blocks();
        prop_assert_eq!(&whole.hashes()[..full], &prefix.hashes()[..full]);
    }
}
