//! `flashcore inspect`.

use std::path::Path;
use std::process::Command;

use cuda::toolkit::Toolkit;
use serde_json::Value;

use crate::{command, fail, failure, json, succeed, success};

/// Named, so that the tests do not depend on the GPU of the machine.
const HOPPER: [&str; 2] = ["--target", "sm_90a"];

const PRODUCT: &str = "product_bf16_n128_w128_kks_s4_c1";

/// Every family on Hopper; those of Ampere first.
const FAMILIES: [&str; 16] = [
    "scalar",
    "mma",
    "combine",
    "backward-mma",
    "row_sums",
    "rounding",
    "sink_gradients",
    "decode",
    "append",
    "widen",
    "forward",
    "prefill",
    "backward",
    "sequencer",
    "single",
    "product",
];

#[test]
fn kernels_are_listed() {
    let text = succeed(&[&["inspect"], &HOPPER[..]].concat());
    for family in FAMILIES {
        assert!(text.lines().any(|line| line.starts_with(family)), "no `{family}` in\n{text}");
    }
    let names = succeed(&[&["inspect", "--all"], &HOPPER[..]].concat());
    assert!(names.lines().any(|name| name == PRODUCT), "{names}");

    let answer = json(&["inspect", "--target", "sm_80", "--json"]);
    assert_eq!(answer["target"], "sm_80");
    let families = answer["families"].as_array().unwrap();
    let names: Vec<&str> = families.iter().filter_map(|family| family["name"].as_str()).collect();
    assert_eq!(names, FAMILIES[..10], "an Ampere GPU runs no wgmma");
}

#[test]
fn a_kernel_is_taken_apart() {
    let text = succeed(&[&["inspect", PRODUCT], &HOPPER[..]].concat());
    for word in [PRODUCT, "swizzle b128", "tensor map", "stages full", "98368 of 232448 bytes"] {
        assert!(text.contains(word), "no `{word}` in\n{text}");
    }
    let answer = json(&[&["inspect", PRODUCT, "--json"], &HOPPER[..]].concat());
    assert_eq!(answer["family"], "product");
    assert_eq!(answer["ptx_version"], "8.0");
    assert_eq!(answer["configuration"]["columns"], 128);
    assert_eq!(answer["roles"][0]["name"], "producer");
    assert_eq!(answer["instructions"]["families"]["wgmma"], 4);
    assert_eq!(answer["ptx"], Value::Null);
    let regions = answer["shared_memory"]["regions"].as_array().unwrap();
    let last = regions.last().unwrap();
    let end = last["offset"].as_u64().unwrap() + last["bytes"].as_u64().unwrap();
    assert_eq!(answer["shared_memory"]["bytes"], end);
}

#[test]
fn a_family_stands_for_one_of_its_configurations() {
    for (family, name) in [
        ("scalar", "scalar_f32_d64x64_dense"),
        ("mma", "mma_bf16_d128x128_dense_128x64_w4a1r2"),
        ("single", "single_wgmma_f16"),
        ("product", PRODUCT),
    ] {
        let text = succeed(&[&["inspect", family, "--ptx"], &HOPPER[..]].concat());
        assert!(text.contains(&format!(".visible .entry {name}(")), "{family}: {text}");
    }
}

#[test]
fn a_plan_is_explained() {
    let problem = ["--problem", "b=1,h=16,s=4096,d=128,bf16,causal"];
    let text = succeed(&[&["inspect"], &problem[..], &HOPPER].concat());
    for word in ["gpu/forward", "chosen", "gpu/scalar", "possible", "forward_bf16_d128x128_causal_"]
    {
        assert!(text.contains(word), "no `{word}` in\n{text}");
    }
    for word in ["queries,", "tiles", "blocks of", "waves", "shared memory"] {
        assert!(text.contains(word), "no `{word}` in\n{text}");
    }
    let answer = json(&[&["inspect", "--json"], &problem[..], &HOPPER].concat());
    assert_eq!(answer["chip"]["target"], "sm_90a");
    assert_eq!(answer["chosen"]["kernel"], "forward");
    assert_eq!(answer["candidates"].as_array().unwrap().len(), 7);
    let (launch, tiling) = (&answer["launches"][0], &answer["chosen"]["launch"]["tiling"]);
    assert_eq!(tiling["tiles"], tiling["tiles_per_head"].as_u64().unwrap() * 16);
    assert!(launch["shared_bytes"].as_u64() <= launch["shared_limit"].as_u64(), "{launch}");
    assert_eq!(launch["configuration"], answer["chosen"]["configuration"]);
    assert_eq!(answer["memory"][0]["name"], "tile lists");

    let older = json(&[&["inspect", "--json", "--target", "sm_80"], &problem[..]].concat());
    assert_eq!(older["chosen"]["kernel"], "mma");
    assert_eq!(older["candidates"][0]["reason"], "sm_80 has no wgmma");
    assert_eq!(older["chosen"]["launch"]["tiling"]["splits"], 1);
    let few = ["--problem", "b=1,h=8,s=64,sk=8192,d=128"];
    let split = succeed(&[&["inspect", "--target", "sm_80"], &few[..]].concat());
    assert!(split.contains("keys split") && split.contains("put together"), "{split}");
    let decode = ["--problem", "b=1,h=8,s=1,sk=8192,d=128"];
    let answer = json(&[&["inspect", "--json", "--target", "sm_80"], &decode[..]].concat());
    assert_eq!(answer["chosen"]["kernel"], "decode");
    let packed = ["--problem", "b=9,h=16,s=99,d=128,queries=packed:300,keys=packed:300"];
    let text = succeed(&[&["inspect"], &packed[..], &HOPPER].concat());
    for word in ["prepares", "sequencer", "launches", "schedule"] {
        assert!(text.contains(word), "no `{word}` in\n{text}");
    }
    let asked = [&packed[..], &["--kernel", "decode", "--json"], &HOPPER].concat();
    assert_eq!(json(&[&["inspect"], &asked[..]].concat())["chosen"]["kernel"], "decode");
    let oldest = json(&[&["inspect", "--json", "--target", "sm_75"], &problem[..]].concat());
    assert_eq!(oldest["chosen"]["kernel"], "scalar");
}

#[test]
fn problems_that_mean_nothing_are_refused_in_a_line() {
    let refuse = |problem: &str| fail(2, &["inspect", "--problem", problem]);
    assert!(refuse("b=1,x=2").contains("there is no size `x`"));
    assert!(refuse("bf17").contains("`bf17` means nothing; a problem is written like"));
    assert!(fail(2, &["inspect", "single", "--problem", "d=64"]).contains("cannot be used with"));
}

#[test]
fn the_environment_may_insist_on_a_kernel() {
    let mut inspect = command(&["inspect", "--problem", "d=20", "--target", "sm_90a"]);
    inspect.env("FLASHCORE_KERNEL", "forward");
    assert_eq!(
        failure(1, inspect),
        "gpu/forward cannot serve this problem: head dim 20 is not a multiple of 8 up to 256; \
         gpu/scalar, cpu/blocked can"
    );
    let mut inspect = command(&["inspect", "--problem", "d=64", "--target", "sm_90a", "--json"]);
    inspect.env("FLASHCORE_KERNEL", "gpu/scalar");
    let answer: Value = serde_json::from_str(&success(inspect)).unwrap();
    assert_eq!(answer["chosen"]["kernel"], "scalar");
}

/// A kernel is one of the forward pass or of gradients; the other pass is planned without it. On the
/// command line it is an error.
#[test]
fn the_environment_insists_for_one_pass() {
    let chosen = |kernel: &str, problem: &str| {
        let mut inspect =
            command(&["inspect", "--problem", problem, "--target", "sm_90a", "--json"]);
        inspect.env("FLASHCORE_KERNEL", kernel);
        let answer: Value = serde_json::from_str(&success(inspect)).unwrap();
        answer["chosen"]["kernel"].as_str().unwrap().to_owned()
    };
    for (kernel, forward, gradients) in [
        ("mma", "mma", "backward"),
        ("cpu/blocked", "blocked", "backward"),
        ("backward-mma", "forward", "backward-mma"),
        ("gpu/backward", "forward", "backward"),
    ] {
        assert_eq!(chosen(kernel, "s=512,d=64,bf16"), forward, "{kernel}");
        assert_eq!(chosen(kernel, "s=512,d=64,bf16,backward"), gradients, "{kernel}");
    }
    let mut unknown =
        command(&["inspect", "--problem", "d=64,bf16,backward", "--target", "sm_90a"]);
    unknown.env("FLASHCORE_KERNEL", "nothing");
    assert!(failure(1, unknown).contains("there is no kernel `nothing` here"));
    let asked =
        ["inspect", "--problem", "d=64,bf16,backward", "--target", "sm_90a", "--kernel", "mma"];
    assert!(fail(1, &asked).contains("there is no kernel `mma` here"));
}

#[test]
fn ptx_is_for_the_target_and_goes_to_a_file() {
    let ptx = succeed(&["inspect", "scalar", "--target", "sm_75", "--ptx"]);
    assert!(ptx.starts_with(".version 6.3\n.target sm_75\n"), "{ptx}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kernel.ptx");
    let arguments = ["inspect", "scalar", "--target", "sm_75", "--ptx", "--output"];
    let path = path.to_str().unwrap();
    assert!(succeed(&[&arguments[..], &[path]].concat()).contains(path));
    assert_eq!(std::fs::read_to_string(path).unwrap(), ptx);
    let nowhere = fail(1, &[&arguments[..], &["/nowhere/kernel.ptx"]].concat());
    assert!(nowhere.starts_with("cannot write /nowhere/kernel.ptx: "), "{nowhere}");

    let answer = json(&["inspect", "scalar", "--target", "sm_75", "--ptx", "--json"]);
    assert_eq!(answer["ptx"], ptx);
}

#[test]
fn kernels_and_targets_that_do_not_exist_are_refused_in_a_line() {
    let inspect = |name| fail(1, &[&["inspect", name], &HOPPER[..]].concat());
    assert_eq!(
        inspect("product_bf16_n12"),
        "there is no kernel `product_bf16_n12` for sm_90a, but \
         product_bf16_n120_w128_kks_s4_c1, product_bf16_n128_w128_kks_s4_c1"
    );
    assert!(inspect("PRODUCT_F16").ends_with(" more"));
    let families = format!("configurations of {}", FAMILIES.join(", "));
    assert!(inspect("unheard-of").contains(&families), "{}", inspect("unheard-of"));
    assert_eq!(
        fail(1, &["inspect", "product", "--target", "sm_80"]),
        "kernel `product` is not for sm_80, only for sm_90a"
    );
    let old = fail(1, &["inspect", "mma", "--target", "sm_75"]);
    assert!(old.starts_with("kernel `mma` is not for sm_75, only for sm_80, sm_86"), "{old}");
    let target = fail(2, &["inspect", "scalar", "--target", "sm_42"]);
    assert!(target.contains("`sm_42` is no known target"), "{target}");
    assert!(target.contains("sm_75") && target.contains("sm_90a"), "{target}");
}

#[test]
fn options_that_mean_nothing_are_refused() {
    assert!(fail(2, &["inspect", "--ptx"]).contains("KERNEL"));
    assert!(fail(2, &["inspect", "single", "--output", "x"]).contains("--ptx|--sass"));
    assert!(fail(2, &["inspect", "single", "--ptx", "--sass"]).contains("cannot be used with"));
    assert!(fail(2, &["inspect", "single", "--all"]).contains("cannot be used with"));
    // A kernel or a back end is chosen for a problem; what is looked into is named alone.
    assert!(fail(2, &["inspect", "--kernel", "forward"]).contains("--problem"));
    let message = fail(2, &["inspect", "forward", "--kernel", "unheard-of"]);
    assert!(message.contains("cannot be used with"), "{message}");
    assert!(fail(2, &["inspect", "--backend", "gpu"]).contains("--problem"));
}

#[test]
fn assemblers_find_nothing_to_complain_about() {
    let Some(toolkit) = Toolkit::for_tests() else {
        return;
    };
    let answer = json(&["inspect", "scalar", "--target", "sm_90", "--json"]);
    let assembly = &answer["assembly"];
    assert_eq!(assembly["clean"], true, "{assembly}");
    let found = assembly["assemblers"].as_array().unwrap();
    assert!(found.len() >= toolkit.assemblers.len());
    for assembler in found {
        assert!(assembler["registers"].as_u64().unwrap() > 0, "{assembler}");
        assert_eq!(assembler["refusal"], Value::Null);
    }
    let text = succeed(&["inspect", "scalar", "--target", "sm_90"]);
    assert!(text.contains("verdict clean for ptxas "), "{text}");
    // Every compiler is named, old ones too, and none serialises products.
    let answer = json(&["inspect", "forward", "--target", "sm_90a", "--json"]);
    assert_eq!(answer["assembly"]["clean"], true, "{answer}");
    let verdict = answer["assembly"]["verdict"].as_str().unwrap();
    for ptxas in &toolkit.assemblers {
        assert!(verdict.contains(&format!("ptxas {}", ptxas.version)), "{verdict}");
    }
    if toolkit.nvdisasm.is_some() {
        let sass = succeed(&["inspect", "scalar", "--target", "sm_90", "--sass"]);
        assert!(sass.contains("EXIT"), "{sass}");
    }
}

/// A command that finds no tools, unless the system has them in their usual place.
fn without_tools(arguments: &[&str], empty: &Path) -> Option<Command> {
    if Path::new("/usr/local/cuda/bin/ptxas").exists() {
        eprintln!("skipped: the CUDA toolkit is installed");
        return None;
    }
    let mut command = command(arguments);
    command.current_dir(empty);
    for variable in ["PATH", "CUDA_HOME", "CUDA_PATH", "FLASHCORE_TOOLS"] {
        command.env(variable, empty);
    }
    Some(command)
}

#[test]
fn missing_tools_are_said_in_a_line() {
    let empty = tempfile::tempdir().unwrap();
    let inspect = ["inspect", "scalar", "--target", "sm_75"];
    let with_sass = [&inspect[..], &["--sass"]].concat();
    let Some(sass) = without_tools(&with_sass, empty.path()) else {
        return;
    };
    let message = failure(1, sass);
    assert!(message.starts_with("ptxas not found"), "{message}");
    // The rest needs no tools.
    let text = success(without_tools(&inspect, empty.path()).unwrap());
    assert!(text.contains("ScaleLog2"), "{text}");
    assert!(text.contains("not assembled: ptxas not found"), "{text}");
}
