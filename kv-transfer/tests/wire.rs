//! The wire format: golden bytes, round trips, and bytes that no node would send.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fmt::Debug;
use std::path::Path;

use kv_block::{BlockHash, HandoffId, Part, Side};
use kv_transfer::*;
use proptest::collection::vec;
use proptest::prelude::*;

/// The encoding must be the one in `tests/golden`. With `SEGUE_WRITE_GOLDEN=1`
/// it is written there instead.
fn check_golden(name: &str, bytes: &[u8]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(format!("{name}.hex"));
    let hex: String = bytes
        .chunks(32)
        .map(|row| row.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "\n")
        .collect();
    if std::env::var_os("SEGUE_WRITE_GOLDEN").is_some() {
        std::fs::write(&path, hex).unwrap();
        return;
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        hex, golden,
        "\nthe encoding of {name} has changed: bump PROTOCOL_VERSION (now {PROTOCOL_VERSION}), say so in \
         CHANGELOG.md and docs/wire-format.md, and write new golden bytes with SEGUE_WRITE_GOLDEN=1\n"
    );
}

fn golden<M: Message + PartialEq + Debug>(name: &str, message: M) {
    let bytes = message.encode();
    check_golden(name, &bytes);
    assert_eq!(M::decode(&bytes).unwrap(), message);
}

fn hello() -> Hello {
    Hello {
        protocol: 1,
        name: "decode-0".into(),
        role: "decode".into(),
        address: "127.0.0.1:7002".into(),
        pid: 4711,
        model: "SmolLM2-135M-Instruct".into(),
        fingerprint: [1; 32],
        layout: [2; 32],
        block_tokens: 64,
        context_tokens: 8192,
        slots: 8,
        blocks_unsupported: String::new(),
    }
}

fn status() -> Status {
    Status {
        sequence: 1,
        slots_used: 2,
        requests_in_flight: 3,
        handoffs_active: 4,
        staged_bytes: 5,
        queue_tokens: 6,
        kv_used_tokens: 7,
        kv_total_tokens: 8,
        prefill_tokens_total: 9,
        installed_tokens_total: 10,
        generated_tokens_total: 11,
        transfer_bytes_total: 12,
        handoffs_completed_total: 13,
        handoffs_failed_total: 14,
        handoff_micros_total: 15,
        handoff_tail_micros_total: 16,
        late_frames_total: 17,
        steps_total: 18,
        step_micros_max: 19,
    }
}

fn generate() -> Generate {
    Generate {
        request_id: "request-1".into(),
        tokens: vec![1, 2, 3, 49_151],
        sampling: Sampling { temperature: 0.5, top_p: 0.9, top_k: 40, min_p: 0.05, seed: 42 },
        max_tokens: 128,
        ignore_end: true,
        isolation: [3; 32],
        prefill: vec![PrefillCandidate { name: "prefill-0".into(), address: "127.0.0.1:7001".into() }],
        fallback_local: true,
    }
}

fn prefill_request() -> PrefillRequest {
    PrefillRequest {
        protocol: 1,
        handoff: [9; 16],
        request_id: "request-1".into(),
        fingerprint: [1; 32],
        layout: [2; 32],
        isolation: [3; 32],
        block_tokens: 64,
        tokens: vec![1, 2, 3, 49_151],
        have_blocks: 5,
        end: 4300,
        codecs: vec![0, 7],
        credit_bytes: 64 << 20,
    }
}

fn header() -> FrameHeader {
    FrameHeader {
        handoff: HandoffId([9; 16]),
        block_index: 66,
        block_hash: BlockHash([4; 32]),
        part: Part { section: 1, layer: 29, side: Side::V },
        codec: 0,
        raw_bytes: 24_576,
        encoded_bytes: 24_575,
        checksum: 0x0123_4567_89ab_cdef,
    }
}

#[test]
fn control_messages_have_their_golden_bytes() {
    golden("control_hello", ControlMessage::Hello(hello()));
    golden("control_welcome", ControlMessage::Welcome { protocol: 1 });
    golden("control_rejected", ControlMessage::Rejected { reason: "protocol 2, expected 1".into() });
    golden("control_status", ControlMessage::Status(status()));
    golden("control_warm", ControlMessage::Warm { slot: 3, hashes: vec![[5; 32], [6; 32]] });
    golden("control_draining", ControlMessage::Draining);
}

#[test]
fn request_messages_have_their_golden_bytes() {
    golden("generate", generate());
    golden(
        "request_started",
        RequestEvent::Started {
            cached_tokens: 64,
            prefilled_by: "prefill-0".into(),
            fallback_reason: "prefill-1 is busy".into(),
            installed_tokens: 4300,
        },
    );
    golden("request_tokens", RequestEvent::Tokens(vec![5, 6, 7]));
    golden("request_finished_stop", RequestEvent::Finished(FinishReason::Stop));
    golden("request_finished_length", RequestEvent::Finished(FinishReason::Length));
    for (name, kind) in [
        ("invalid", FailureKind::Invalid),
        ("busy", FailureKind::Busy),
        ("prefill_unavailable", FailureKind::PrefillUnavailable),
        ("draining", FailureKind::Draining),
        ("internal", FailureKind::Internal),
    ] {
        golden(
            &format!("request_failed_{name}"),
            RequestEvent::Failed { kind, message: "why it failed".into() },
        );
    }
}

#[test]
fn handoff_messages_have_their_golden_bytes() {
    golden("prefill_request", prefill_request());
    golden(
        "handoff_accepted",
        HandoffMessage::Accepted {
            queued_tokens: 1,
            expected_start_ms: 2,
            reused_tokens: 3,
            chunk_tokens: 256,
        },
    );
    for (name, reason) in [
        ("busy", RefusalReason::Busy),
        ("mismatch", RefusalReason::Mismatch),
        ("too_long", RefusalReason::TooLong),
        ("no_codec", RefusalReason::NoCodec),
        ("draining", RefusalReason::Draining),
        ("invalid", RefusalReason::Invalid),
    ] {
        golden(&format!("handoff_refused_{name}"), HandoffMessage::Refused { reason, message: "why".into() });
    }
    golden("handoff_progress", HandoffMessage::Progress { computed_tokens: 512, reused_tokens: 64 });
    golden("handoff_credit", HandoffMessage::Credit { bytes: 1 << 20 });
    golden(
        "handoff_complete",
        HandoffMessage::Complete { block_count: 67, token_count: 4299, digest: [8; 32] },
    );
    golden("handoff_installed", HandoffMessage::Installed);
    golden("handoff_cancel", HandoffMessage::Cancel { reason: "client left".into() });
}

#[test]
fn frame_headers_have_their_golden_bytes() {
    check_golden("frame_header", &header().encode());
    assert_eq!(FrameHeader::decode(&header().encode()).unwrap(), header());
}

#[test]
fn the_longest_prompt_fits_into_its_messages() {
    let tokens = vec![u32::MAX; 1 << 20];
    assert!(Generate { tokens: tokens.clone(), ..generate() }.encode().len() <= Generate::BYTES_MAX);
    assert!(PrefillRequest { tokens, ..prefill_request() }.encode().len() <= PrefillRequest::BYTES_MAX);
}

#[test]
fn a_frame_header_out_of_bounds_is_refused_with_the_bound() {
    let refused = |change: fn(&mut FrameHeader)| {
        let mut bad = header();
        change(&mut bad);
        FrameHeader::decode(&bad.encode()).unwrap_err().to_string()
    };
    let limit = "allowed at most 67108864";
    assert!(refused(|h| h.raw_bytes = u32::MAX).contains(limit));
    assert!(refused(|h| h.encoded_bytes = (64 << 20) + 1).contains(limit));
    assert!(refused(|h| h.raw_bytes = 0).contains("raw_bytes is 0"));
}

#[test]
fn a_frame_header_with_another_side_or_padding_is_malformed() {
    for (offset, value) in [(56, 2), (57, 1)] {
        let mut bytes = header().encode();
        bytes[offset] = value;
        assert!(matches!(FrameHeader::decode(&bytes), Err(TransferError::Malformed { .. })));
    }
}

/// Peer bytes may decode by chance; what they must not do is panic or give
/// another error than `Malformed`.
fn survives<M: Message>(bytes: &[u8]) {
    if let Err(error) = M::decode(bytes) {
        assert!(matches!(error, TransferError::Malformed { .. }), "{error}");
    }
}

/// As every kind of message, the kind byte replaced so that the rest is looked at.
fn survives_all(bytes: &[u8]) {
    fn as_kind<M: Message>(bytes: &[u8]) {
        survives::<M>(bytes);
        let mut bytes = bytes.to_vec();
        if let Some(kind) = bytes.first_mut() {
            *kind = M::KIND;
        }
        survives::<M>(&bytes);
    }
    as_kind::<ControlMessage>(bytes);
    as_kind::<Generate>(bytes);
    as_kind::<RequestEvent>(bytes);
    as_kind::<PrefillRequest>(bytes);
    as_kind::<HandoffMessage>(bytes);
}

#[test]
fn a_message_of_another_kind_is_malformed_and_both_kinds_are_named() {
    let error = HandoffMessage::decode(&prefill_request().encode()).unwrap_err();
    assert_eq!(error.to_string(), "malformed handoff message: kind is 4, expected 5");
}

fn samples() -> Vec<Vec<u8>> {
    vec![
        ControlMessage::Hello(hello()).encode(),
        ControlMessage::Status(status()).encode(),
        ControlMessage::Warm { slot: 3, hashes: vec![[5; 32]; 4] }.encode(),
        generate().encode(),
        RequestEvent::Tokens(vec![5, 6, 7]).encode(),
        RequestEvent::Failed { kind: FailureKind::Busy, message: "why it failed at last".into() }.encode(),
        prefill_request().encode(),
        HandoffMessage::Cancel { reason: "the client has left".into() }.encode(),
    ]
}

#[test]
fn every_truncation_of_a_message_survives() {
    for sample in samples() {
        for end in 0..sample.len() {
            survives_all(&sample[..end]);
            survives_all(&sample[end..]);
        }
    }
}

fn digest() -> impl Strategy<Value = [u8; 32]> {
    any::<[u8; 32]>()
}

fn control() -> impl Strategy<Value = ControlMessage> {
    prop_oneof![
        (".*", ".*", any::<u32>(), digest(), any::<u32>()).prop_map(|(name, model, pid, layout, slots)| {
            ControlMessage::Hello(Hello { name, model, pid, layout, slots, ..hello() })
        }),
        any::<u32>().prop_map(|protocol| ControlMessage::Welcome { protocol }),
        ".*".prop_map(|reason| ControlMessage::Rejected { reason }),
        (any::<u64>(), any::<u32>(), any::<u64>()).prop_map(|(sequence, slots_used, staged_bytes)| {
            ControlMessage::Status(Status { sequence, slots_used, staged_bytes, ..status() })
        }),
        (any::<u16>(), vec(digest(), 0..20)).prop_map(|(slot, hashes)| ControlMessage::Warm { slot, hashes }),
        Just(ControlMessage::Draining),
    ]
}

fn any_generate() -> impl Strategy<Value = Generate> {
    let sampling = (0f32..100., 0f32..=1., any::<u32>(), 0f32..=1., any::<u64>()).prop_map(
        |(temperature, top_p, top_k, min_p, seed)| Sampling { temperature, top_p, top_k, min_p, seed },
    );
    let prefill = vec((".*", ".*").prop_map(|(name, address)| PrefillCandidate { name, address }), 0..4);
    (".*", vec(any::<u32>(), 0..300), sampling, any::<u32>(), any::<bool>(), digest(), prefill).prop_map(
        |(request_id, tokens, sampling, max_tokens, ignore_end, isolation, prefill)| Generate {
            request_id,
            tokens,
            sampling,
            max_tokens,
            ignore_end,
            isolation,
            prefill,
            fallback_local: !ignore_end,
        },
    )
}

fn request_event() -> impl Strategy<Value = RequestEvent> {
    prop_oneof![
        (any::<u32>(), ".*", ".*", any::<u32>()).prop_map(
            |(cached_tokens, prefilled_by, fallback_reason, installed_tokens)| RequestEvent::Started {
                cached_tokens,
                prefilled_by,
                fallback_reason,
                installed_tokens
            }
        ),
        vec(any::<u32>(), 0..50).prop_map(RequestEvent::Tokens),
        Just(RequestEvent::Finished(FinishReason::Length)),
        ".*".prop_map(|message| RequestEvent::Failed { kind: FailureKind::Internal, message }),
    ]
}

fn any_prefill_request() -> impl Strategy<Value = PrefillRequest> {
    (any::<[u8; 16]>(), ".*", digest(), vec(any::<u32>(), 0..300), vec(any::<u16>(), 0..5), any::<u64>())
        .prop_map(|(handoff, request_id, isolation, tokens, codecs, credit_bytes)| PrefillRequest {
            handoff,
            request_id,
            isolation,
            tokens,
            codecs,
            credit_bytes,
            ..prefill_request()
        })
}

fn handoff_message() -> impl Strategy<Value = HandoffMessage> {
    prop_oneof![
        (any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>()).prop_map(
            |(queued_tokens, expected_start_ms, reused_tokens, chunk_tokens)| HandoffMessage::Accepted {
                queued_tokens,
                expected_start_ms,
                reused_tokens,
                chunk_tokens
            }
        ),
        ".*".prop_map(|message| HandoffMessage::Refused { reason: RefusalReason::TooLong, message }),
        any::<u64>().prop_map(|bytes| HandoffMessage::Credit { bytes }),
        (any::<u32>(), any::<u32>(), digest()).prop_map(|(block_count, token_count, digest)| {
            HandoffMessage::Complete { block_count, token_count, digest }
        }),
        Just(HandoffMessage::Installed),
        ".*".prop_map(|reason| HandoffMessage::Cancel { reason }),
    ]
}

fn round_trips<M: Message + PartialEq + Debug>(message: M) {
    assert_eq!(M::decode(&message.encode()).unwrap(), message);
}

proptest! {
    #[test]
    fn control_messages_round_trip(message in control()) {
        round_trips(message);
    }

    #[test]
    fn generate_requests_round_trip(message in any_generate()) {
        round_trips(message);
    }

    #[test]
    fn request_events_round_trip(message in request_event()) {
        round_trips(message);
    }

    #[test]
    fn prefill_requests_round_trip(message in any_prefill_request()) {
        round_trips(message);
    }

    #[test]
    fn handoff_messages_round_trip(message in handoff_message()) {
        round_trips(message);
    }

    #[test]
    fn frame_headers_round_trip(
        handoff in any::<[u8; 16]>(), hash in digest(), block_index: u32, section: u16, layer: u16,
        value: bool, codec: u16, raw_bytes in 1..=FrameHeader::PAYLOAD_BYTES_MAX,
        encoded_bytes in 0..=FrameHeader::PAYLOAD_BYTES_MAX, checksum: u64,
    ) {
        let part = Part { section, layer, side: if value { Side::V } else { Side::K } };
        let header = FrameHeader {
            handoff: HandoffId(handoff), block_hash: BlockHash(hash), block_index, part, codec, raw_bytes,
            encoded_bytes, checksum,
        };
        prop_assert_eq!(FrameHeader::decode(&header.encode()).unwrap(), header);
    }

    #[test]
    fn random_frame_headers_never_panic(bytes in vec(any::<u8>(), FrameHeader::BYTES)) {
        if let Err(error) = FrameHeader::decode(bytes.as_slice().try_into().unwrap()) {
            assert!(matches!(error, TransferError::Malformed { .. } | TransferError::TooLarge { .. }));
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in vec(any::<u8>(), 0..400)) {
        survives_all(&bytes);
    }

    #[test]
    fn corrupt_messages_never_panic(sample in 0usize..8, flips in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut bytes = samples().swap_remove(sample);
        for (index, value) in flips {
            let index = index.index(bytes.len());
            bytes[index] ^= value;
        }
        survives_all(&bytes);
    }
}
